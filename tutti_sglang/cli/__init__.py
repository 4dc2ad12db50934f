"""The command `tutti`: what a person who runs the tier sees of it."""
