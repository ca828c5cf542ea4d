// Command generate makes the stubs in waldv1, and reasons.go, from the contract in proto/.
//
// It needs nothing but Go: the contract is compiled in this process, and the two
// generators are tools that go.mod pins.
//
//	proto/wald/v1/*.proto ──protocompile──▶ descriptors ──protoc-gen-go──────▶ waldv1/*.pb.go
//	                                                    ├─protoc-gen-go-grpc─▶ waldv1/*_grpc.pb.go
//	                                                    └─reasons────────────▶ reasons.go
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"go/format"
	"log"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"

	"github.com/bufbuild/protocompile"
	"github.com/bufbuild/protocompile/linker"
	"github.com/bufbuild/protocompile/protoutil"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/pluginpb"
)

const (
	// The contract, seen from the folder of go.mod, where `go generate` runs this.
	protoRoot = "../../proto"
	module    = "wald.dev/client/go"
	target    = "waldv1"
)

func main() {
	log.SetFlags(0)
	if err := generate(context.Background()); err != nil {
		log.Fatalf("generate: %v", err)
	}
}

func generate(ctx context.Context) error {
	files, request, err := compile(ctx)
	if err != nil {
		return err
	}
	if err := reasons(files); err != nil {
		return err
	}
	// A file of the contract that is gone must not leave its stubs behind.
	if err := os.RemoveAll(target); err != nil {
		return err
	}
	for _, generator := range []string{"protoc-gen-go", "protoc-gen-go-grpc"} {
		if err := run(ctx, generator, request); err != nil {
			return fmt.Errorf("%s: %w", generator, err)
		}
	}
	return nil
}

// compile reads the contract and asks for stubs of all its files.
func compile(ctx context.Context) (linker.Files, *pluginpb.CodeGeneratorRequest, error) {
	matches, err := filepath.Glob(filepath.Join(protoRoot, "wald", "v1", "*.proto"))
	if err != nil {
		return nil, nil, err
	}
	if len(matches) == 0 {
		return nil, nil, fmt.Errorf("no contract in %s", protoRoot)
	}
	var names []string
	parameters := []string{"module=" + module}
	for _, match := range matches {
		name := path.Join("wald", "v1", filepath.Base(match))
		names = append(names, name)
		parameters = append(parameters, fmt.Sprintf("M%s=%s/%s", name, module, target))
	}
	compiler := protocompile.Compiler{
		Resolver: protocompile.WithStandardImports(&protocompile.SourceResolver{
			ImportPaths: []string{protoRoot},
		}),
		// The comments of the contract become the comments of the stubs.
		SourceInfoMode: protocompile.SourceInfoStandard,
	}
	files, err := compiler.Compile(ctx, names...)
	if err != nil {
		return nil, nil, err
	}
	return files, &pluginpb.CodeGeneratorRequest{
		FileToGenerate: names,
		Parameter:      proto.String(strings.Join(parameters, ",")),
		ProtoFile:      withImports(files),
	}, nil
}

// reasons writes a constant for each reason of errors, with its comment.
func reasons(files linker.Files) error {
	file := files.FindFileByPath("wald/v1/errors.proto")
	if file == nil {
		return errors.New("no errors.proto in the contract")
	}
	var text bytes.Buffer
	text.WriteString("// Code generated from wald/v1/errors.proto. DO NOT EDIT.\n\npackage wald\n\n")
	text.WriteString("// The reasons of the contract.\nconst (\n")
	values := file.Enums().ByName("Reason").Values()
	for i := range values.Len() {
		value := values.Get(i)
		if value.Number() == 0 {
			continue
		}
		reason := strings.TrimPrefix(string(value.Name()), "REASON_")
		name := "Err"
		for _, word := range strings.Split(reason, "_") {
			name += word[:1] + strings.ToLower(word[1:])
		}
		comment := strings.TrimSpace(file.SourceLocations().ByDescriptor(value).LeadingComments)
		fmt.Fprintf(&text, "// %s is the reason %s.", name, reason)
		for _, line := range strings.Split(comment, "\n") {
			fmt.Fprintf(&text, "\n//%s", strings.TrimRight(" "+strings.TrimPrefix(line, " "), " "))
		}
		fmt.Fprintf(&text, "\n%s = Reason(%q)\n", name, reason)
	}
	text.WriteString(")\n")
	source, err := format.Source(text.Bytes())
	if err != nil {
		return err
	}
	return os.WriteFile("reasons.go", source, 0o644)
}

// withImports lists the files and their imports, imports first.
func withImports(files linker.Files) []*descriptorpb.FileDescriptorProto {
	var all []*descriptorpb.FileDescriptorProto
	seen := make(map[string]bool)
	var add func(file protoreflect.FileDescriptor)
	add = func(file protoreflect.FileDescriptor) {
		if seen[file.Path()] {
			return
		}
		seen[file.Path()] = true
		imports := file.Imports()
		for i := range imports.Len() {
			add(imports.Get(i).FileDescriptor)
		}
		all = append(all, protoutil.ProtoFromFileDescriptor(file))
	}
	for _, file := range files {
		add(file)
	}
	return all
}

// run hands the request to a generator and writes the files that it answers.
func run(ctx context.Context, generator string, request *pluginpb.CodeGeneratorRequest) error {
	input, err := proto.Marshal(request)
	if err != nil {
		return err
	}
	command := exec.CommandContext(ctx, "go", "tool", generator)
	command.Stdin = bytes.NewReader(input)
	command.Stderr = os.Stderr
	output, err := command.Output()
	if err != nil {
		return err
	}
	var response pluginpb.CodeGeneratorResponse
	if err := proto.Unmarshal(output, &response); err != nil {
		return err
	}
	if response.Error != nil {
		return errors.New(response.GetError())
	}
	for _, file := range response.File {
		name := filepath.FromSlash(file.GetName())
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(name, []byte(file.GetContent()), 0o644); err != nil {
			return err
		}
	}
	return nil
}
