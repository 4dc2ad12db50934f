"""`python -m tutti_sglang.cli`."""

from tutti_sglang.cli.app import main

main()
