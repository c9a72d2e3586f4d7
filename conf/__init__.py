"""The configuration files, installed as `mprun.conf`."""
