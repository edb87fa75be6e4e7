package train

import (
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/data"
	"github.com/cprun/cprun/partition"
)

// A samples is a data.Loader, or a data.Mixture of several.
type samples interface {
	// Samples returns how many there are in an epoch.
	Samples() int64
	// Index returns the sample that is the n-th of the run.
	Index(n int64) int64
	// Docs returns the lengths of a sample's documents.
	Docs(sample int64) []int
	// Valid returns the number of a sample's targets.
	Valid(sample int64) int
	// Targets returns the number of targets of an epoch.
	Targets() int64
	// Alike reports whether Docs and Valid are the same for all samples.
	Alike() bool
	// Load reads one rank's shard of a sample.
	Load(sample int64, spans []partition.Span, ids, targets []int32, positions []int) error
}

// tokenizerOf returns the tokenizer of a run's text.
func tokenizerOf(cfg *config.Config) *data.Tokenizer {
	return data.NewTokenizer(cfg.Data.Tokenizer, cfg.Model.VocabSize)
}

// openData opens files: one dataset of all, or one for each that has a weight.
func openData(cfg *config.Config, files config.Files, tok *data.Tokenizer) ([]*data.Dataset, error) {
	groups := [][]string{files.Globs()}
	if files.Mixed() {
		groups = nil
		for _, glob := range files.Globs() {
			groups = append(groups, []string{glob})
		}
	}
	var sources []*data.Dataset
	for _, globs := range groups {
		ds, err := data.Open(data.Source{Paths: globs, Tokenizer: tok, EOS: cfg.Data.EOSTokenID, Vocab: cfg.Model.VocabSize})
		if err != nil {
			return nil, err
		}
		sources = append(sources, ds)
	}
	return sources, nil
}

// cutData cuts what openData has opened into samples.
func cutData(cfg *config.Config, files config.Files, sources []*data.Dataset, shuffle bool) (samples, error) {
	var parts []*data.Loader
	var weights []float64
	for k, ds := range sources {
		l, err := data.New(ds, data.Plan{
			SeqLen: cfg.Data.SeqLen, Shuffle: shuffle, Seed: cfg.Data.Seed + int64(k), PackDocuments: cfg.Data.PackDocuments,
		})
		if err != nil {
			return nil, err
		}
		parts, weights = append(parts, l), append(weights, files[k].Weight)
	}
	if !files.Mixed() {
		return parts[0], nil
	}
	return data.Mix(parts, weights, cfg.Data.Seed)
}
