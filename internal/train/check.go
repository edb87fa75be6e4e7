package train

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cprun/cprun/internal/config"
	"github.com/cprun/cprun/internal/data"
	"github.com/cprun/cprun/internal/hf"
	"github.com/cprun/cprun/internal/model"
)

// Check finds, before any process is spawned, what is wrong with the files that a config
// names: data that is too short, tokens outside the vocabulary, weights that do not fit. Each
// fault names the place of its key, and all are reported.
func Check(cfg *config.Config) error {
	var all config.Errors
	note := func(key string, err error) {
		var faults config.Errors
		if err != nil && errors.As(cfg.Fault(key, err), &faults) {
			all = append(all, faults...)
		}
	}
	tok := tokenizerOf(cfg)
	check := func(key string, files config.Files) {
		err := checkData(cfg, files, tok)
		if bad := (*data.TokenizerError)(nil); errors.As(err, &bad) {
			key = "data.tokenizer"
		} else if errors.Is(err, data.ErrNoTokenizer) {
			key, err = "data.tokenizer", fmt.Errorf("%w: %s", err, cfg.NoTokenizer())
		}
		note(key, err)
	}
	check("data.path", cfg.Data.Path)
	if v := cfg.Data.Validation; v.Every > 0 && v.Path != "" && !slices.ContainsFunc(all, func(f config.Fault) bool { return f.Key == "data.tokenizer" }) {
		check("data.validation.path", config.Files{{Path: v.Path}})
	}
	if cfg.Model.From != "" {
		note("model.from", checkWeights(cfg))
	}
	if len(all) == 0 {
		return nil
	}
	return all
}

func checkWeights(cfg *config.Config) error {
	w, err := hf.OpenWeights(cfg.Model.From)
	if err != nil {
		return err
	}
	defer w.Close()
	return w.Check(cfg.Model.Family(), Tensors(model.Layout(&cfg.Model.Config)))
}

// FirstDocuments returns the lengths of the documents of the first sample that a run of a config whose files
// were checked trains on; nil where documents are not told apart.
func FirstDocuments(cfg *config.Config) ([]int, error) {
	if !cfg.Data.PackDocuments {
		return nil, nil
	}
	sources, err := openData(cfg, cfg.Data.Path, tokenizerOf(cfg))
	if err != nil {
		return nil, err
	}
	l, err := cutData(cfg, cfg.Data.Path, sources, cfg.Data.Shuffle)
	if err != nil {
		return nil, err
	}
	return l.Docs(l.Index(0)), nil
}

// checkedTokens is how much of a dataset is read before training to find tokens outside the
// vocabulary: what takes a moment. The rest is checked as it is read.
const checkedTokens = 64 << 20

// checkData opens files as a run does, and reads them if they are not too many.
func checkData(cfg *config.Config, files config.Files, tok *data.Tokenizer) error {
	sources, err := openData(cfg, files, tok)
	if err != nil {
		return err
	}
	if _, err := cutData(cfg, files, sources, false); err != nil {
		return err
	}
	left := int64(checkedTokens)
	for _, ds := range sources {
		if left -= ds.Len(); left < 0 {
			return nil
		}
		if err := ds.Check(); err != nil {
			return err
		}
	}
	return nil
}
