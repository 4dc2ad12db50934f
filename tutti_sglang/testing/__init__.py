"""The shipped test kit: what every engine must do, seeded faults, damage that checksums must notice."""
