"""What people type: a file for each command of `saguaro`, with its options (`add`) and what it does with them (`run`).

Every start of the program loads all of them: heavy imports wait for `run`.
"""
