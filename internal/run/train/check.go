package train

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/data"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/partition"
)

// Data is how much training data a config names.
type Data struct {
	Files            int64
	Documents        *int64 // nil: not counted, since that takes a pass over many tokens
	Tokens           int64  // of all files
	Targets          int64  // of an epoch's samples
	Samples          int64  // of an epoch
	DroppedDocuments int64
	StepsPerEpoch    int64
	Ignored          []string // keys of records that change nothing
}

// Check finds, before any process is spawned, the faults of the files that a config names: data that is too short,
// tokens outside the vocabulary, weights that do not fit. It reports all of them, each at the place of its key.
// Without faults it returns how much data there is.
func Check(cfg *config.Config) (*Data, error) {
	var all config.Errors
	note := func(key string, err error) {
		var faults config.Errors
		if err != nil && errors.As(cfg.Fault(key, err), &faults) {
			all = append(all, faults...)
		}
	}
	tok := tokenizerOf(cfg)
	check := func(key string, files config.Files, most int) *Data {
		found, err := checkData(cfg, files, tok, int64(most))
		if bad := (*data.TokenizerError)(nil); errors.As(err, &bad) {
			key = "data.tokenizer"
		} else if errors.Is(err, data.ErrNoTokenizer) {
			key, err = "data.tokenizer", fmt.Errorf("%w: %s", err, cfg.NoTokenizer())
		}
		note(key, err)
		return found
	}
	found := check("data.path", cfg.Data.Path, 0)
	ofTokenizer := func(f config.Fault) bool { return f.Key == "data.tokenizer" }
	if v := cfg.Data.Validation; v.Every > 0 && v.Path != "" && !slices.ContainsFunc(all, ofTokenizer) {
		check("data.validation.path", config.Files{{Path: v.Path}}, v.Samples)
	}
	if cfg.Model.From != "" {
		note("model.from", checkWeights(cfg))
	}
	if len(all) == 0 {
		return found, nil
	}
	return nil, all
}

func checkWeights(cfg *config.Config) error {
	w, err := hf.OpenWeights(cfg.Model.From)
	if err != nil {
		return err
	}
	defer w.Close()
	return w.Check(cfg.Model.Family(), cfg.Model.Tensors())
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

// checkedTokens bounds the tokens that are read before training to find ids outside the vocabulary: a second's work.
// The rest is checked when it is trained on.
const checkedTokens = 64 << 20

// checkData opens files as a run does, counts, and reads them if they are not too many. It wants a target among the
// first samples, as many as most; 0: among all.
func checkData(cfg *config.Config, files config.Files, tok *data.Tokenizer, most int64) (*Data, error) {
	sources, err := openData(cfg, files, tok)
	if err != nil {
		return nil, err
	}
	l, err := cutData(cfg, files, sources, false)
	if err != nil {
		return nil, err
	}
	targets := 0
	for s := int64(0); s < min(most, l.Samples()) && targets == 0; s++ {
		targets += l.Valid(s)
	}
	if most > 0 && targets == 0 {
		return nil, fmt.Errorf("none of the first %d samples has a target; take more", most)
	}
	batch := int64(cfg.Train.GlobalBatchSize)
	found := &Data{Samples: l.Samples(), Targets: l.Targets(), StepsPerEpoch: (l.Samples() + batch - 1) / batch}
	left, documents, counted := int64(checkedTokens), int64(0), true
	var ignored data.Keys
	for _, ds := range sources {
		left -= ds.Len()
		n, err := ds.Check(left >= 0)
		if err != nil {
			return nil, err
		}
		counted, documents = counted && n >= 0, documents+n
		found.Files, found.Tokens = found.Files+ds.Files(), found.Tokens+ds.Len()
		ignored.Add(ds.Ignored()...)
	}
	if counted {
		found.Documents = &documents
	}
	found.Ignored = ignored.Sorted()
	return found, nil
}

// A load describes the attention of a step for the ranks that share its sequences.
type load struct {
	// slowest and mean are visible pairs of all heads: of the rank with most and of the mean rank,
	// over the layers and sequences, after each of which the ranks wait for each other.
	slowest, mean float64
	sent          int64 // bytes of keys, values, their gradients and exchanged heads that this rank sends
}

func (l *load) add(o load, times int) {
	l.slowest += float64(times) * o.slowest
	l.mean += float64(times) * o.mean
}

// imbalance returns the work of the slowest rank over the mean rank's, or 1 without work.
func (l *load) imbalance() float64 {
	if l.mean == 0 {
		return 1
	}
	return l.slowest / l.mean
}

// loadOf returns the work of one layer for one sequence, if that many ranks exchange heads.
func loadOf(shape partition.Shape, traders, heads int) (l load) {
	work := partition.WorkOfHeads(partition.Work(shape), traders, heads)
	l.slowest = float64(slices.Max(work))
	for _, n := range work {
		l.mean += float64(n) / float64(len(work))
	}
	return l
}

// tally counts the bytes that a ring sends.
type tally struct {
	comm.Exchanger
	sent int64
}

// Exchange implements comm.Exchanger.
func (t *tally) Exchange(send, recv []comm.Message) (comm.Pending, error) {
	for i := range send {
		t.sent += int64(send[i].View.Size()) * int64(send[i].View.DType().Size())
	}
	return t.Exchanger.Exchange(send, recv)
}
