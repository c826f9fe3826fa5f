"""Caches of keys and values: storage, lengths and pages, kept on the host and on the device.

A `KVCache` or `PagedKVCache` is a `Cache` (layers, append, write, decode), that is `Sequences`
(their lengths). All of it is in one `Store`, which views and layers share.
"""
