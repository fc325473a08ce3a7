"""Instruments of the developers: comparisons with other programs and tables of measurements. Not installed."""
