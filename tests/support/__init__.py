"""What tests need of the world: a real S3 server, a faulty network."""
