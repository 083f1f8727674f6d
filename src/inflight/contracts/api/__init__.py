"""What users import, and what it accepts: options, parameters, outputs, errors, facts about a model."""
