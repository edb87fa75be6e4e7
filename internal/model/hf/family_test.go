package hf

import (
	"slices"
	"testing"
)

func TestFamiliesAreRegisteredOnceAndWhole(t *testing.T) {
	if got := Families(); !slices.Equal(got, []string{Gemma2, Gemma3, Llama, "mistral", "phi3", "qwen2", Qwen3,
		"smollm3"}) {
		t.Errorf("families are %v", got)
	}
	nameless := *families[Llama]
	nameless.Name, nameless.Tensors = "nameless", nameless.Tensors.with(Names{Down: ""})
	for what, f := range map[string]Family{"a family twice": *families[Llama], "a family without a tensor's name": nameless} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s was registered", what)
				}
			}()
			Register(f)
		}()
	}
}

func TestAnd(t *testing.T) {
	for want, words := range map[string][]string{"": nil, "a": {"a"}, "a and b": {"a", "b"}, "a, b and c": {"a", "b", "c"}} {
		if got := wordList(words...); got != want {
			t.Errorf("%v: %q, want %q", words, got, want)
		}
	}
}
