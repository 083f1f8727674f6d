"""The live page in a real Chromium; `make test-browser` installs one."""
