"""[model] The model, the loss and each site's data; losses and gradients of all nodes at once."""
