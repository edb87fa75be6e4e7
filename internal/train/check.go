package train

import (
	"fmt"

	"github.com/cprun/cprun/internal/config"
	"github.com/cprun/cprun/internal/data"
	"github.com/cprun/cprun/internal/hf"
	"github.com/cprun/cprun/internal/model"
)

// Check finds, before any process is spawned, what is wrong with the files that a config
// names: data that is too short, tokens outside the vocabulary, weights that do not fit.
func Check(cfg *config.Config) error {
	if err := checkData(cfg, "data.path", cfg.Data.Path); err != nil {
		return err
	}
	if v := cfg.Data.Validation; v.Every > 0 && v.Path != "" {
		if err := checkData(cfg, "data.validation.path", v.Path); err != nil {
			return err
		}
	}
	if cfg.Model.From == "" {
		return nil
	}
	w, err := hf.OpenWeights(cfg.Model.From)
	if err != nil {
		return fmt.Errorf("model.from: %w", err)
	}
	defer w.Close()
	if err := w.Check(Tensors(model.Layout(&cfg.Model.Config))); err != nil {
		return fmt.Errorf("model.from: %w", err)
	}
	return nil
}

// checkedTokens is how much of a dataset is read before training to find tokens outside the
// vocabulary: what takes a moment. The rest is checked as it is read.
const checkedTokens = 64 << 20

func checkData(cfg *config.Config, key, path string) error {
	ds, err := data.Open(source(cfg, path))
	if err != nil {
		return fmt.Errorf("%s: %w", key, err)
	}
	if _, err := data.New(ds, cut(cfg, false)); err != nil {
		return fmt.Errorf("%s: %w", key, err)
	}
	if ds.Len() > checkedTokens {
		return nil
	}
	if err := ds.Check(); err != nil {
		return fmt.Errorf("%s: %w", key, err)
	}
	return nil
}

func source(cfg *config.Config, path string) data.Source {
	return data.Source{Path: path, Tokenizer: cfg.Data.Tokenizer, EOS: cfg.Data.EOSTokenID, Vocab: cfg.Model.VocabSize}
}

func cut(cfg *config.Config, shuffle bool) data.Plan {
	return data.Plan{SeqLen: cfg.Data.SeqLen, Shuffle: shuffle, Seed: cfg.Data.Seed, PackDocuments: cfg.Data.PackDocuments}
}
