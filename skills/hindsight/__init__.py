"""Hindsight: what a finished trajectory teaches, in words (SEED, OPID, SkillRL).

An analyst reads trajectories (`episodes`, `prompting`, `model_analyst`), its reply is read without
trust (`replies`, `parse`, `checks`), and the notes become teacher's skills, labels for a cold start
(`labels`) or candidates of a bank (`to_items`, `evolve`).
"""
