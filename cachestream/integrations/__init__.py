"""Other frameworks, one module each; nothing below this folder knows of them, and only they import them."""
