package config

import "path/filepath"

// Bytes is the tokenizer that takes each byte of text for a token.
const Bytes = "bytes"

const (
	tokenizerFile = "tokenizer.json"
	tokenizerKey  = "data.tokenizer"
	eosKey        = "data.eos_token_id"
)

// resolveTokenizer makes data.tokenizer "bytes" or the path of a tokenizer.json. Auto stays where
// the model has none: only text needs one.
func (l *loader) resolveTokenizer() {
	t := &l.cfg.Data.Tokenizer
	if !l.ok(tokenizerKey) || *t == Bytes {
		return
	}
	if *t == "" {
		if !l.ok("model.from") {
			return
		}
		if l.cfg.Model.From == "" {
			*t = Bytes
		} else if path := filepath.Join(l.cfg.Model.From, tokenizerFile); l.disk.isFile(path) {
			*t = path
		}
		return
	}
	given := *t
	abs, tried := l.find(given, l.where.of(tokenizerKey).line == 0, func(path string) bool {
		return l.disk.isFile(path) || l.disk.isFile(filepath.Join(path, tokenizerFile))
	})
	if *t = abs; !l.disk.isFile(abs) && tried == "" {
		*t = filepath.Join(abs, tokenizerFile)
	}
	switch {
	case tried == "" || l.opts.NoFiles:
	case Nearest(given, []string{Bytes, "auto"}) != "":
		l.add(tokenizerKey, "%s is not a choice; did you mean %s?", found(given), Nearest(given, []string{Bytes, "auto"}))
	default:
		l.add(tokenizerKey, "no tokenizer %s; name a tokenizer.json or its directory, or write bytes", tried)
	}
}

// ownEOS sets data.eos_token_id to the model's own where it is null. To bytes a model's own says
// something only where it is no byte.
func (l *loader) ownEOS() {
	d := &l.cfg.Data
	if d.EOSTokenID >= 0 || !l.fromRead || !l.ok(eosKey, tokenizerKey, "model.from", "model.vocab_size") {
		return
	}
	id, err := l.disk.eos(l.cfg.Model.From)
	if err != nil {
		l.add(eosKey, "it is null, for the model's own, and that is not readable: %v; write its number", err)
		return
	}
	if id < l.cfg.Model.VocabSize && (d.Tokenizer != Bytes || id > 255) {
		d.EOSTokenID = id
	}
}
