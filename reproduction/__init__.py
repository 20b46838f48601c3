"""The paper's tables, figures and theorems, run again and set beside what it prints."""
