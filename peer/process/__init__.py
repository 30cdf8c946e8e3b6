"""The border between the training process and the network process."""
