"""What a run will do, known before the first weight is read: units, kinds, rules, memory, and every refusal."""
