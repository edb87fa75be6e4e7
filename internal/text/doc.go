// Package text is a wing of packages that turn files of text into token ids. It knows no model.
//
//	data -> tokenizer, chat    the samples of text, conversations and columns; tokenizer.json; chat templates (Jinja)
package text
