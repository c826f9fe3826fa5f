"""The public verbs, a file each: arrays -> Problem -> Plan -> launch."""
