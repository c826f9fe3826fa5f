"""Problem + Device -> Plan: kernel, tile, grid and order. Integers only, no CuPy."""
