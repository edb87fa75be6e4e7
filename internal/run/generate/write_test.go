package generate

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
)

// The text depends on the seed, but not on the number of threads.
func TestTheSameSeedWritesTheSameText(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	cfg := randomModel(r)
	weights := randomWeights(cfg, r)
	text := func(threads int, seed int64) []int32 {
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(threads))
		m := loaded(t, cfg, weights, 300)
		req := Request{Prompt: []int32{1, 2, 3, 4, 5, 6, 7, 8, 9}, MaxTokens: 120, Sampling: Sampling{Temperature: 1.5,
			TopP: 0.98, Seed: seed}}
		return written(t, m, req, EndTokens)
	}
	want := text(1, 5)
	for _, threads := range []int{1, 2, 3, 7} {
		if got := text(threads, 5); !slices.Equal(got, want) {
			t.Errorf("on %d threads\n%v, on one\n%v", threads, got, want)
		}
	}
	if slices.Equal(text(1, 6), want) {
		t.Error("another seed writes the same text")
	}
}

func TestWhereATextEnds(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	cfg := randomModel(r)
	weights := randomWeights(cfg, r)
	req := Request{Prompt: []int32{1, 2, 3}, MaxTokens: 30, Sampling: Sampling{Temperature: 1, TopP: 1, Seed: 1}}
	all := written(t, loaded(t, cfg, weights, 100), req, EndTokens)
	if len(all) != 30 {
		t.Fatalf("%d tokens, want 30", len(all))
	}
	if got := written(t, loaded(t, cfg, weights, 20), req, EndRoom); !slices.Equal(got, all[:17]) {
		t.Errorf("with room for 20 behind a prompt of 3 it writes %v, with more %v", got, all)
	}
	end := all[10]
	first := slices.Index(all, end)
	stops := req
	stops.Ends = []int{cfg.VocabSize + 7, int(end)}
	if got := written(t, loaded(t, cfg, weights, 100), stops, EndOfText); !slices.Equal(got, all[:first]) {
		t.Errorf("with the end %d it writes %v, without %v", end, got, all)
	}
	none := req
	none.MaxTokens = 0
	if got := written(t, loaded(t, cfg, weights, 3), none, EndTokens); len(got) != 0 {
		t.Errorf("no token was asked for: %v", got)
	}
}

func TestWriteStopsWhenItIsTold(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	cfg := randomModel(r)
	weights := randomWeights(cfg, r)
	req := Request{Prompt: []int32{1, 2, 3}, MaxTokens: 30, Sampling: Sampling{TopP: 1}}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	n := 0
	rep, err := loaded(t, cfg, weights, 100).Write(ctx, req, func(int32) error {
		if n++; n == 4 {
			cancel()
		}
		return nil
	})
	if err != nil || rep.End != Interrupted || rep.Tokens != 4 {
		t.Errorf("%+v, %v; want an interrupt after 4 tokens", rep, err)
	}
	full := errors.New("no space left on device")
	if _, err := loaded(t, cfg, weights, 100).Write(t.Context(), req,
		func(int32) error { return full }); !errors.Is(err, full) {
		t.Errorf("the text could not be written, and the error is %v", err)
	}
}
