"""What differential privacy costs, and an audit of its mechanism."""
