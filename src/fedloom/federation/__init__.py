"""Who holds what: silos, groups, partitions and the sources of records."""
