"""Experiments: `get_config(arg)` gives the config of one stage; a variant imports the base and changes fields."""
