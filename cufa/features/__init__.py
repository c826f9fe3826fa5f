"""What may stand between Q K^T and the softmax, a file a feature."""
