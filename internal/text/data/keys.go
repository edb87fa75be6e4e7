package data

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"unicode"
)

// A use is the effect of a key.
type use string

// A key that no rule names is ignored. So is a key of another kind of record.
const (
	useRead    use = "read"
	useRefused use = "refused"
	useIgnored use = "ignored"
)

// kindTurn marks a message of a conversation. The other kinds are the formats of records.
const kindTurn = "turn"

// allKinds lists the kinds of records.
const allKinds = FormatText + " " + FormatTokens + " " + FormatMessages + " " + FormatCompletion

// A keyRule gives the effect of keys, of records of some kinds or of turns. A key may begin or end with *.
type keyRule struct {
	keys, kinds string
	use         use
	note        string // the meaning, or the fix
}

// keyRules lists the keys that decide what is trained or shown. The first rule for a key and its kind counts.
// docs/formats.md has this list.
var keyRules = []keyRule{
	{keyText, FormatText, useRead, "the document"},
	{keyIDs, FormatTokens, useRead, "the tokens; nothing is appended"},
	{keyLabels, FormatTokens, useRead, "the token to predict at that position, or −100 for none"},
	{strings.Join(masks, " "), FormatTokens, useRead, "a target needs a 1 in each mask, and a label"},
	{keyAttention, FormatTokens, useRead, "zeros at the end are padding and are cut off"},
	{"seq_lengths", FormatTokens, useRead, "the lengths of the documents in the record"},
	{"cu_seqlens", FormatTokens, useRead, "their borders, from 0 to the number of tokens"},
	{"document_ids segment_ids", FormatTokens, useRead, "a number for each token, which changes where a document begins"},
	{keyPositions, FormatTokens, useRead, "a document begins at each 0"},
	{"token_type_ids special_tokens_mask label", FormatTokens, useIgnored, "change nothing"},
	{keyMessages, FormatMessages, useRead, "the turns"},
	{keyConversations, FormatMessages, useRead, "the turns, as ShareGPT has them"},
	{keyPrompt + " " + keyCompletion, FormatCompletion, useRead, "texts, or lists of turns"},
	{keySystem, FormatMessages, useRead, "the first turn, of the system"},
	{"system_prompt system_message", FormatMessages + " " + FormatCompletion, useRefused, "name it system, or remove it"},
	{keyFunctions, FormatMessages, useRead, "beside conversations the same as tools, else refused"},
	{keySystem, FormatCompletion, useRefused, "make it the first turn of the prompt"},
	{keyFunctions, FormatCompletion, useRefused, "name it tools"},
	{keyTools + " " + keyDocuments, FormatMessages + " " + FormatCompletion, useRead,
		"a list, or its JSON, for the chat template"},
	{keyKwargs, FormatMessages + " " + FormatCompletion, useRead, "variables of the chat template"},
	{strings.Join(flagKeys, " "), allKinds, useRead, "must be 1 or true; leave other records out of the file"},
	{"chosen rejected", allKinds, useRefused, "preference pairs cannot be trained on; write the chosen answers alone"},
	{"role from", kindTurn, useRead, "who speaks. In ShareGPT human, gpt, function_call and observation are user, " +
		"assistant, assistant and tool"},
	{"content value name tool_calls tool_call_id reasoning_content thinking reasoning", kindTurn, useRead,
		"for the chat template"},
	{strings.Join(flagKeys, " "), kindTurn, useRead, "with 0 or false the turn is no target"},
	{"function_call", kindTurn, useRefused, "write it as tool_calls"},
	{"train* loss* *_weight", kindTurn, useRefused, "it looks as if it chose targets, and " +
		strings.Join(flagKeys, ", ") + " do: rename or remove it"},
	{media, allKinds + " " + kindTurn, useRefused, "only text is trained; leave such records out"},
	{"mask masks token_weights sample_weight sample_weights weights", allKinds + " " + kindTurn, useRefused,
		"give weight 0 or 1 to turns, or a loss_mask to input_ids"},
	{"cu_seq_lens* seq_idx", FormatTokens, useRefused, "name the borders cu_seqlens, or segment_ids"},
	{"*_mask *labels target_* loss_*", allKinds + " " + kindTurn, useRefused, "it looks as if it chose targets, and " +
		keyLabels + ", " + strings.Join(masks, ", ") + " do: rename or remove it"},
}

// media lists keys and types of content that are not text.
const media = "image images image_url audio audios input_audio video videos pixel_values"

// flagKeys lists the keys of a turn that say whether it is a target.
var flagKeys = []string{"weight", "loss", "train", "trainable"}

// rulesOf holds the rules by kind; "": rules of every kind of record.
var rulesOf = func() map[string]kindRules {
	all := map[string]kindRules{}
	for _, kind := range append(strings.Fields(allKinds), kindTurn, "") {
		k := kindRules{map[string]keyRule{}, nil}
		for _, own := range []bool{true, false} { // then keys of other kinds
			for _, r := range keyRules {
				if own != (strings.Contains(" "+r.kinds+" ", " "+kind+" ") || kind == "" && strings.HasPrefix(r.kinds, allKinds)) {
					continue
				}
				for _, key := range strings.Fields(r.keys) {
					before, after, pattern := strings.Cut(key, "*")
					_, known := k.exact[key]
					switch {
					case own && pattern:
						k.patterns = append(k.patterns, keyPattern{before, after, r})
					case own && !known:
						k.exact[key] = r
					case !own && !known && kind != kindTurn && r.kinds != kindTurn:
						k.exact[key] = keyRule{use: useIgnored}
					}
				}
			}
		}
		all[kind] = k
	}
	return all
}()

type (
	kindRules struct {
		exact    map[string]keyRule
		patterns []keyPattern
	}
	keyPattern struct {
		before, after string
		keyRule
	}
)

// ruleOf returns the rule of a key in a record or turn of a kind; "": of unknown kind.
func ruleOf(key, kind string) keyRule {
	k := rulesOf[kind]
	if r, ok := k.exact[key]; ok {
		return r
	}
	for _, p := range k.patterns {
		if strings.HasPrefix(key, p.before) && strings.HasSuffix(key, p.after) {
			return p.keyRule
		}
	}
	return keyRule{use: useIgnored}
}

// matters reports whether the value of a key is needed in records of some kind.
func matters(key string) bool {
	return slices.ContainsFunc(strings.Fields(allKinds), func(kind string) bool {
		return ruleOf(key, kind).use != useIgnored
	})
}

// checkKey refuses a key of a record or turn with a value, or reports whether it is ignored.
func checkKey(key, kind string, value []byte, hasIDs bool) (without bool, err error) {
	switch r := ruleOf(key, kind); {
	case r.use == useRefused && !slices.Contains([]string{"[]", `""`, "{}"}, string(value)):
		return false, fmt.Errorf("key %q is not read: %s", key, r.note)
	case r.use == useIgnored && kind != kindTurn && !hasIDs && ruleOf(key, FormatTokens).kinds == FormatTokens &&
		ruleOf(key, FormatTokens).use == useRead:
		return false, fmt.Errorf("%q without %q; it describes them", key, keyIDs)
	case r.use == useRead && kind != kindTurn && slices.Contains(flagKeys, key):
		if on, err := flag(value); err != nil || !on {
			return false, fmt.Errorf("key %q of a record %s, not %.20s", key, r.note, value)
		}
	default:
		return r.use == useIgnored, nil
	}
	return false, nil
}

// flag reads a flag as JSON.
func flag(value []byte) (on bool, err error) {
	switch string(value) {
	case "true", "1", "1.0":
		return true, nil
	case "false", "0", "0.0":
		return false, nil
	}
	return false, errors.New("not a flag")
}

// shown returns a key, which a file chooses, as one short word.
func shown(key string) string {
	if r := []rune(key); len(r) > 40 {
		key = string(r[:40]) + "…"
	}
	if key == "" || strings.ContainsFunc(key, func(r rune) bool { return !unicode.IsGraphic(r) || r == ',' }) {
		return strconv.Quote(key)
	}
	return key
}

// maxKeys bounds a set, since the keys of all records may differ.
const maxKeys = 50

// Keys is a set of record keys, safe for concurrent use. A nil set stays empty.
type Keys struct {
	set sync.Map
	n   atomic.Int32
}

// Add adds keys.
func (k *Keys) Add(keys ...string) {
	for _, key := range keys {
		if k == nil || k.n.Load() > maxKeys {
			return
		}
		if _, known := k.set.LoadOrStore(key, true); !known && k.n.Add(1) > maxKeys {
			k.set.Delete(key)
			k.set.Store("and others", true)
		}
	}
}

// has reports whether Add would change nothing.
func (k *Keys) has(key string) bool {
	if k == nil {
		return true
	}
	_, ok := k.set.Load(key)
	return ok
}

// Sorted lists the keys.
func (k *Keys) Sorted() (keys []string) {
	k.set.Range(func(key, _ any) bool {
		keys = append(keys, key.(string))
		return true
	})
	slices.Sort(keys)
	return keys
}
