"""What happens before a node runs: keys, files, the mesh and the experiment that its sites agree on."""
