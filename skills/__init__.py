"""Skills: what earlier nights learned, kept as text and given to students and teachers.

This folder is Python. Coding agents look for `SKILL.md` folders under the same name; those are
an export format here, not what this package contains.
"""
