"""Built-in tuned tables, one JSON file a GPU, as ``python -m cufa tune`` writes them."""
