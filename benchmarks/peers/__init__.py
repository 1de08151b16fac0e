"""Other loaders beside ours, in one run: `make bench-peers`, one small module for each of them."""
