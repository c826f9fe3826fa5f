"""Caches of keys and values: storage, lengths and pages, kept on the host and on the device."""
