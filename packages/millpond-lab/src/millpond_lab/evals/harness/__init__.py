"""The evaluation run: plan, rounds of questions, store, results, summary and paired differences."""
