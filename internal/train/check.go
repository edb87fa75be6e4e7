package train

import (
	"errors"

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
	note("data.path", checkData(cfg, cfg.Data.Path))
	if v := cfg.Data.Validation; v.Every > 0 && v.Path != "" {
		note("data.validation.path", checkData(cfg, v.Path))
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
	return w.Check(Tensors(model.Layout(&cfg.Model.Config)))
}

// checkedTokens is how much of a dataset is read before training to find tokens outside the
// vocabulary: what takes a moment. The rest is checked as it is read.
const checkedTokens = 64 << 20

func checkData(cfg *config.Config, path string) error {
	ds, err := data.Open(source(cfg, path))
	if err != nil {
		return err
	}
	if _, err := data.New(ds, cut(cfg, false)); err != nil {
		return err
	}
	if ds.Len() > checkedTokens {
		return nil
	}
	return ds.Check()
}

func source(cfg *config.Config, path string) data.Source {
	return data.Source{Path: path, Tokenizer: cfg.Data.Tokenizer, EOS: cfg.Data.EOSTokenID, Vocab: cfg.Model.VocabSize}
}

func cut(cfg *config.Config, shuffle bool) data.Plan {
	return data.Plan{SeqLen: cfg.Data.SeqLen, Shuffle: shuffle, Seed: cfg.Data.Seed, PackDocuments: cfg.Data.PackDocuments}
}
