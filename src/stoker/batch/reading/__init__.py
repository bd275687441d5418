"""What a training's curves say about its learning rate, its batch and its data."""
