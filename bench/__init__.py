"""Measures a deployment: load tests and the tools they need. Every run writes one JSON."""
