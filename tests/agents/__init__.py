"""Agents of other packages, which call tools in several turns; `make agents` installs the packages."""
