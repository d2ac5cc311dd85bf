"""`saguaro doctor`: looks at the machine, and at whether a deployment can run on it. It changes nothing."""
