package launch

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
)

// Variables of TransformerEngine that users of context parallelism have in their scripts.
// They mean here what they mean there.
const (
	envFlashAttn   = "NVTE_FLASH_ATTN"
	envFusedAttn   = "NVTE_FUSED_ATTN"
	envUnfusedAttn = "NVTE_UNFUSED_ATTN"
	envDebug       = "NVTE_DEBUG"
	envDebugLevel  = "NVTE_DEBUG_LEVEL"
)

// AttentionEnv is what the environment says about attention's backends.
type AttentionEnv struct {
	NoFlash, NoFused, NoUnfused bool
	Debug                       int // NVTE_DEBUG times NVTE_DEBUG_LEVEL: 0, 1 or 2
}

var nvteVariables = []struct {
	name, meaning string
	most          int
	set           func(e *AttentionEnv, n int)
}{
	{envFlashAttn, "0: attention.backend flash is not chosen; 1 is the default", 1, func(e *AttentionEnv, n int) { e.NoFlash = n == 0 }},
	{envFusedAttn, "0: attention.backend fused (cuDNN) is not chosen; 1 is the default", 1, func(e *AttentionEnv, n int) { e.NoFused = n == 0 }},
	{envUnfusedAttn, "0: attention.backend unfused is not chosen; 1 is the default", 1, func(e *AttentionEnv, n int) { e.NoUnfused = n == 0 }},
	{envDebug, "1: NVTE_DEBUG_LEVEL counts", 1, func(e *AttentionEnv, n int) { e.Debug = n }},
	{envDebugLevel, "with NVTE_DEBUG=1: at least that much is said about the choice of a backend, as attention.debug 0, 1 or 2", 2,
		func(e *AttentionEnv, n int) { e.Debug *= n }},
}

// Attention reads the environment's part in the choice of a backend. The error names every
// variable whose value means nothing.
func Attention() (AttentionEnv, error) { return attentionEnv(os.LookupEnv) }

func attentionEnv(lookup func(string) (string, bool)) (AttentionEnv, error) {
	var e AttentionEnv
	var faults []error
	level := false
	for _, v := range nvteVariables {
		text, ok := lookup(v.name)
		if !ok {
			continue
		}
		level = level || v.name == envDebugLevel
		choices := []string{"0", "1", "2"}[:v.most+1]
		n := slices.Index(choices, text)
		if n < 0 {
			faults = append(faults, fmt.Errorf("environment: %s=%.60q: want %s, or unset %s", v.name, text, strings.Join(choices, " or "), v.name))
			continue
		}
		v.set(&e, n)
	}
	if !level {
		e.Debug = 0 // the level's default is 0, as in TransformerEngine
	}
	return e, errors.Join(faults...)
}

// Honoured is one line on the variables that are set and that change what a run does, "" where
// none is.
func Honoured() string {
	var set []string
	for _, v := range Environment() {
		if v.Set && v.changes {
			set = append(set, v.Name+"="+quoteOdd(v.Value))
		}
	}
	if len(set) == 0 {
		return ""
	}
	return "environment: " + strings.Join(set, " ")
}

// quoteOdd keeps a value readable on one line of a terminal.
func quoteOdd(s string) string {
	if q := fmt.Sprintf("%.80q", s); q != `"`+s+`"` || strings.Contains(s, " ") {
		return q
	}
	return s
}
