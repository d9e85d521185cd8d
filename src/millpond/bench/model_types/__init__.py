"""Every type of language model that the installed transformers knows, in tiny form: does a Millpond cache carry it?"""
