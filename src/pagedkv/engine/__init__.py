"""The loop: plan -> submit -> collect -> commit -> deliver."""
