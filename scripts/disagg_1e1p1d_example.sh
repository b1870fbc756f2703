#!/usr/bin/env bash
# One instance that encodes, one that prefills, one that decodes: see disagg_example.sh
exec "$(dirname "$0")/disagg_example.sh" 1e1p1d
