"""Requests to instances over connections of `epd.http`; failures become errors of a stage."""
