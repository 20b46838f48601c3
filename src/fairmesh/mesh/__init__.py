"""Training between organisations."""
