"""What is trained on what: models as flat rows, each site's data, the losses and gradients of all nodes at once."""
