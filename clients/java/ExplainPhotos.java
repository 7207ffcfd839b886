// Explains photos by a camserve server, by what protoc makes of the .proto files alone: README.md says how to build it.
//
//     java ExplainPhotos localhost:50051 out cat.jpg dog.jpg

import camserve.v1.Explain.ExplainRequest;
import camserve.v1.Explain.ExplainResponse;
import camserve.v1.Explain.Explanation;
import camserve.v1.Explain.ImageFormat;
import camserve.v1.Explain.Method;
import camserve.v1.Explain.Prediction;
import camserve.v1.Explain.Rendering;
import camserve.v1.ExplainServiceGrpc;
import com.google.protobuf.ByteString;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.StatusRuntimeException;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import java.nio.file.StandardOpenOption;
import java.util.HashSet;
import java.util.List;
import java.util.Locale;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.TimeUnit;
import java.util.regex.Pattern;

/** One call for each photo, with a deadline. */
public final class ExplainPhotos {
  private static final int MESSAGE = 64 << 20; // bytes: gRPC's own limit, 4 MiB, is less than an overlay may have
  private static final int SECONDS = 30;

  private final ExplainServiceGrpc.ExplainServiceBlockingStub service;
  private final Path out;
  private final Set<String> taken = new HashSet<>();

  private ExplainPhotos(ManagedChannel channel, Path out) {
    this.service = ExplainServiceGrpc.newBlockingStub(channel);
    this.out = out;
  }

  public static void main(String[] arguments) throws IOException {
    if (arguments.length < 3) {
      System.err.println("error: say a server, a folder for the pictures, and photos: localhost:50051 out cat.jpg");
      System.exit(1);
    }
    // TLS is useTransportSecurity(); a token then goes in the metadata, as "authorization: Bearer ...". Without TLS no
    // proxy is used: it could read and change everything that passes through it.
    ManagedChannel channel =
        ManagedChannelBuilder.forTarget(arguments[0])
            .usePlaintext()
            .proxyDetector(address -> null)
            .maxInboundMessageSize(MESSAGE)
            .build();
    Path out = Files.createDirectories(Path.of(arguments[1]));
    boolean all = true;
    try {
      ExplainPhotos client = new ExplainPhotos(channel, out);
      for (String photo : List.of(arguments).subList(2, arguments.length)) {
        all &= client.explain(Path.of(photo));
      }
    } finally {
      channel.shutdownNow();
    }
    System.exit(all ? 0 : 1);
  }

  /** Explains a photo, and says in a line what came of it; returns whether a picture did. */
  private boolean explain(Path photo) throws IOException {
    try {
      ByteString image = ByteString.copyFrom(Files.readAllBytes(photo));
      ExplainResponse response = service.withDeadlineAfter(SECONDS, TimeUnit.SECONDS).explain(request(image));
      System.out.println(printable(photo + ": " + save(photo, response)));
      return true;
    } catch (StatusRuntimeException error) {
      System.err.println(printable(photo + ": " + error.getStatus().getDescription()));
    } catch (NoSuchFileException error) {
      System.err.println(printable(photo + ": no such file"));
    }
    return false;
  }

  private static ExplainRequest request(ByteString image) {
    return ExplainRequest.newBuilder()
        .setImage(image)
        .addMethods(Method.newBuilder().setName("gradcam"))
        .setRendering(Rendering.newBuilder().setOverlay(ImageFormat.IMAGE_FORMAT_JPEG))
        .build();
  }

  private String save(Path photo, ExplainResponse response) throws IOException {
    Explanation why = response.getExplanations(0);
    Path path = out.resolve(nameOf(photo) + "." + why.getMethod().replaceAll("[^\\w-]+", "_") + ".jpg");
    // Written under a random name and moved into place: a link at the path is replaced, not followed.
    Path beside = out.resolve("." + UUID.randomUUID());
    Files.write(beside, why.getOverlay().getData().toByteArray(), StandardOpenOption.CREATE_NEW);
    Files.move(beside, path, StandardCopyOption.ATOMIC_MOVE, StandardCopyOption.REPLACE_EXISTING);
    Prediction target = why.getTarget();
    String label = target.getLabel().isEmpty() ? "class " + target.getClassIndex() : target.getLabel();
    return String.format(Locale.ROOT, "%.2f %s by %s: %s", target.getProbability(), label, why.getLayer(), path);
  }

  /** Escapes text from a server, or a file's name, so that a terminal prints it and does not act on it. */
  private static String printable(String text) {
    return Pattern.compile("[\\p{Cc}\\p{Zl}\\p{Zp}\\u061c\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069]")
        .matcher(text)
        .replaceAll(match -> String.format("\\\\u{%x}", match.group().codePointAt(0)));
  }

  /** Returns the photo's name, with a number where another photo has it, in upper or lower case. */
  private String nameOf(Path photo) {
    String stem = photo.getFileName().toString().replaceFirst("\\.[^.]*$", "");
    String name = stem;
    for (int number = 2; !taken.add(name.toLowerCase(Locale.ROOT)); number++) {
      name = stem + "-" + number;
    }
    return name;
  }
}
