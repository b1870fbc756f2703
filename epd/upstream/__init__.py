"""Requests to instances, over connections of `epd.http`; what goes wrong is an error of a stage."""
