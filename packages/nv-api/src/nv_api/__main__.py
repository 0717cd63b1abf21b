"""`python -m nv_api` is the `nv` command."""

from nv_api.cli import main

main()
