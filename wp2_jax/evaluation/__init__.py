"""Measures of generated videos; they take arrays and know no model."""
