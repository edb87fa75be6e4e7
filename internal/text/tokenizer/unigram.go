package tokenizer

import (
	"errors"
	"math"
	"slices"
)

// unigram finds the most likely sequence of tokens for a word.
type unigram struct {
	vocabulary
	scores   []float64
	unk      int32 // -1: none
	unkScore float64
	fallback bool
	bytes    [256]int32
	texts    trie // indexes of vocabulary
}

// unkPenalty lowers the score of an unknown rune below the least likely token.
const unkPenalty = 10

// A pathNode is the best path to a place of the word.
type pathNode struct {
	id    int32
	from  int32 // -1: none was found
	score float64
}

// newUnigram prepares a vocabulary. A token's id is its index.
func newUnigram(tokens []string, scores []float64, unk int32, fallback bool) *unigram {
	u := &unigram{
		vocabulary: make(vocabulary, len(tokens)), scores: scores, unk: unk, fallback: fallback,
		unkScore: math.Inf(1),
	}
	for id, t := range tokens {
		u.vocabulary[t] = int32(id)
		u.unkScore = min(u.unkScore, scores[id])
	}
	u.unkScore -= unkPenalty
	u.bytes, _ = u.byteTokens()
	for t, id := range u.vocabulary {
		if t != "" {
			at := u.texts.node(t)
			u.texts.ends[at] = id
		}
	}
	return u
}

func (u *unigram) size() int { return len(u.scores) }

func (u *unigram) top() int32 { return int32(len(u.scores)) - 1 }

var errNoUnk = errors.New("a character that no token has, and the model has no unk_id")

func (u *unigram) encode(w *work, dst []int32, word string) ([]int32, error) {
	if err := u.search(w, word); err != nil {
		return dst, err
	}
	// The path is followed from its end. Adjacent unknown stretches are joined.
	start := len(dst)
	for end := len(word); end > 0; {
		n := &w.nodes[end]
		from := int(n.from)
		if n.id == u.unk {
			for from > 0 && w.nodes[from].id == u.unk {
				from = int(w.nodes[from].from)
			}
			var err error
			if dst, err = u.unknown(w, dst, word[from:end]); err != nil {
				return dst, err
			}
		} else {
			dst = append(dst, n.id)
		}
		end = from
	}
	slices.Reverse(dst[start:])
	return dst, nil
}

// unknown appends the ids of an unknown stretch in reverse order.
func (u *unigram) unknown(w *work, dst []int32, text string) ([]int32, error) {
	if id, ok := u.vocabulary[text]; ok {
		return append(dst, id), nil
	}
	if u.fallback {
		var ok bool
		if w.ids, ok = appendBytes(w.ids[:0], &u.bytes, text); ok {
			slices.Reverse(w.ids)
			return append(dst, w.ids...), nil
		}
	}
	if u.unk < 0 {
		return dst, errNoUnk
	}
	return append(dst, u.unk), nil
}

func (u *unigram) search(w *work, word string) error {
	w.nodes = slices.Grow(w.nodes[:0], len(word)+1)[:len(word)+1]
	for i := range w.nodes {
		w.nodes[i] = pathNode{from: -1}
	}
	for at := 0; at < len(word); {
		_, n := runeAt(word, at)
		here, single := w.nodes[at].score, false
		reach := func(end int, id int32, score float64) {
			if to := &w.nodes[end]; to.from < 0 || score > to.score {
				*to = pathNode{id, int32(at), score}
			}
		}
		node := int32(0)
		for end := at; end < len(word); {
			var ok bool
			if node, ok = u.texts.next[pair(node, int32(word[end]))]; !ok {
				break
			}
			end++
			if id := u.texts.ends[node]; id >= 0 {
				reach(end, id, u.scores[id]+here)
				single = single || end == at+n
			}
		}
		if !single {
			if u.unk < 0 {
				return errNoUnk
			}
			reach(at+n, u.unk, u.unkScore+here)
		}
		at += n
	}
	return nil
}
