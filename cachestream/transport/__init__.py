"""The bytes of one remote object: requests, deadlines, retries, and accounting."""
