"""Tests of the wrapper front end."""
